"""How large the arrays are that a program makes."""

import math
import re
from collections.abc import Callable
from typing import Any

import jax


def largest_float(function: Callable, *arguments: Any) -> int:
    """Elements of the largest array of floats in a traced function, its arguments included."""
    program = str(jax.make_jaxpr(function)(*arguments))
    shapes = re.findall(r"\b(?:bf16|f16|f32)\[([\d,]+)\]", program)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)
