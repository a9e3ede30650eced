"""What every call of an operation has in common."""
