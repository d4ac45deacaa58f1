"""One adapter a file: each in its framework's own idiom."""
