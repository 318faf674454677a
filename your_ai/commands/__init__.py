"""What each command of the command line does with its options, a module for each kind."""
