"""Typed settings: groups of fields, each declared once. No heavy import happens here."""
