# SPDX-License-Identifier: Apache-2.0
"""What is predicted: who is called next, when, and how long a sub-agent lives."""
