# SPDX-License-Identifier: Apache-2.0
"""A decode node with HBM and High-Bandwidth Flash, simulated: how long the flash lasts under each placement policy."""
