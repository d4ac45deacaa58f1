"""Jobs whose workers come and go: hosts that are discovered, and one world after the other."""
