"""Verified, asynchronous, atomic checkpoints."""

from jaxinfra.checkpoint.checkpointer import Checkpointer as Checkpointer
from jaxinfra.checkpoint.directory_layout import Rejected as Rejected
from jaxinfra.checkpoint.manifest import FileFault as FileFault
from jaxinfra.checkpoint.manifest import Problem as Problem
from jaxinfra.checkpoint.manifest import verify as verify
from jaxinfra.checkpoint.restoring import Restored as Restored
from jaxinfra.checkpoint.restoring import load as load
