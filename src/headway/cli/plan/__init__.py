"""`headway plan`: search for plans, print what was found, and read plan files."""
