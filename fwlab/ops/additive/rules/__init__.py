"""The rules of this recurrence, one page each."""
