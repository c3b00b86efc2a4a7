# SPDX-License-Identifier: Apache-2.0
"""The paper's transition model and its baselines, by family. Needs torch; the families say what else. Not imported when
serving."""
