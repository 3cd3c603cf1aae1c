"""What the tests do for seconds, for as long as you like: `make torture`, or `python -m tests.torture --help`."""
