"""What services that keep figures of runs are sent, and how each of them takes it."""
