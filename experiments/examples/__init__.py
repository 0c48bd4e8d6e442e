"""Complete experiments to copy: each asks one question, and is a page of code."""
