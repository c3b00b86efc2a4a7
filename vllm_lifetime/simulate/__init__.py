# SPDX-License-Identifier: Apache-2.0
"""Trace replay: the policies of the server on a recorded trace, offline."""
