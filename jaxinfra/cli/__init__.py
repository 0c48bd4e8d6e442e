"""Commands of the command line: each parses options, calls one function and prints."""
