"""Serves an engine over HTTP with OpenAI's API."""
