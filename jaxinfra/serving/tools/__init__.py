"""Reads tool calls and reasoning out of answers, in the forms of model families."""
