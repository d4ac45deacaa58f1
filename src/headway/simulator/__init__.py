"""What a plan will do, played: timelines of steps that were never run."""
