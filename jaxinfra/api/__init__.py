"""The functions of ``jaxinfra`` that combine several packages: plan, trace, generate, evaluate and
others.
"""
