"""Reinforcement learning: prompts, rollouts, rewards and advantages, in one process."""
