"""What a step is made of: this rank's batch, random numbers, the user's objects, its record.

Nothing here knows how a plan splits the model; strategies and pipelines build on it."""
