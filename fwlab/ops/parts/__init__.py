"""What several recurrences share."""
