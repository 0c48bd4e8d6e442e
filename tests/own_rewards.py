"""Rewards and advantages of a user's own. Worker processes import this module, so it has no JAX."""

import os
import time

import numpy as np

import jaxinfra


@jaxinfra.part
def misbehaving(completion, *, prompt, row):
    """Does what the completion says; the row's reward where it says nothing."""
    del prompt
    print("printed by a reward")
    match completion:
        case "raise":
            raise ValueError("no such answer")
        case "hang":
            time.sleep(60)
        case "nan":
            return float("nan")
        case "memory":
            return len(bytearray(8 << 30))
        case "exit":
            os._exit(3)
        case "text":
            return "many"
    return row["reward"]


@jaxinfra.part
def first_digit(completion, *, prompt, row):
    """1 for the prompt's own first digit, and some reward for any digit."""
    del row
    return 1.0 if completion[:1] == prompt[:1] else 0.2 * completion[:1].isdigit()


@jaxinfra.part
def answering(turns, *, prompt, row):
    """The number in the last turn; a reply to any other."""
    del row
    if turns[-1].isdigit():
        return int(turns[-1])
    return f"it is {'d' if turns[-1] == 'ask' else prompt}"


@jaxinfra.part
def after_a_reply(turns, *, prompt, row):
    """Asks back once; then some reward by the number of characters."""
    del prompt, row
    return "?" if len(turns) == 1 else 0.1 * (len(turns[-1]) % 3)


@jaxinfra.part
def by_length(completion, *, prompt, row):
    """Some reward by the number of characters; none for one of the prompts."""
    del row
    if prompt == "13=":
        raise ValueError("unlucky")
    return 0.1 * (len(completion) % 3)


@jaxinfra.part
def best_of_group(rewards, is_valid):
    """Advantages of 1 for the best of each group, of 0 for others."""
    return (rewards == np.where(is_valid, rewards, -np.inf).max(axis=1, keepdims=True)) * 1.0


@jaxinfra.part
def unfit(rewards, is_valid):
    """Advantages of too few completions."""
    del is_valid
    return rewards[:, :1]
