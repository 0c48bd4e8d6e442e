"""Frozen dataclasses that describe a run: model, data, optimizer, mesh. Presets are functions."""
