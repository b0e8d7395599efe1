"""The objects that a program holds: init, calls on arrays and pointers, plans, work, and state."""
