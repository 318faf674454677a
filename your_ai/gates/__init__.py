"""Gates for what comes from outside: each kind is checked in one place."""
