"""`headway launch -np N python SCRIPT.py`: horovodrun's arguments, and the program as workers."""
