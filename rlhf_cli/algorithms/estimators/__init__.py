"""Advantage estimators: one file each, with settings, function and row of the table. Loading them imports no torch."""
