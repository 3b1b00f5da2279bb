"""Saves below a read-only folder (first argument) in a given way (second argument); prints the errno."""

from __future__ import annotations

import sys

import victims

import jaxckpt

try:
    victims.save_where_refused(print, sys.argv[1] + "/ckpt", sys.argv[2], None)
except jaxckpt.errors.StorageError as error:
    print(error.errno)
