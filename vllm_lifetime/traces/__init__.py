# SPDX-License-Identifier: Apache-2.0
"""Recorded and generated agent traces: one schema, one reader per format."""
