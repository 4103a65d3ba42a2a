"""What proves the chain on a machine with a GPU (see README.md beside this file)."""
