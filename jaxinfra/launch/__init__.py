"""Several processes as one job: who they are, how they meet, who restarts them."""
