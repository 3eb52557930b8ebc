"""Typed settings: groups of fields, each declared once. Imports nothing heavy."""
