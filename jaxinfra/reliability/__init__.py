"""What is noticed and recorded while a run goes on: by every rank, readable by all of them."""
