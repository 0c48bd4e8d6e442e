"""Loads trained models, generates text with them, serves them over HTTP and evaluates them."""

from jaxinfra.serving.adapter_bank import AdapterBank as AdapterBank
from jaxinfra.serving.adapter_bank import load_bank as load_bank
from jaxinfra.serving.engine.engine import Engine as Engine
from jaxinfra.serving.engine.options import EngineOptions as EngineOptions
from jaxinfra.serving.engine.requests import EndReason as EndReason
from jaxinfra.serving.engine.requests import GenerationRequest as GenerationRequest
from jaxinfra.serving.engine.requests import RequestProgress as RequestProgress
