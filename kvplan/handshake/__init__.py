"""What workers tell each other of themselves: untrusted data, until it has been checked."""
