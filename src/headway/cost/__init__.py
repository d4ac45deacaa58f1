"""What a plan costs, predicted: seconds and bytes of its parts."""
