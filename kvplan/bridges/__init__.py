"""Workers of what an engine has allocated."""
