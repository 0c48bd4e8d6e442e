"""Traces, explained."""
