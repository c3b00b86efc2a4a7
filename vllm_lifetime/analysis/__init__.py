# SPDX-License-Identifier: Apache-2.0
"""How long the context of agents lives and how much of it is written, measured on traces (Lachesis section 3)."""
