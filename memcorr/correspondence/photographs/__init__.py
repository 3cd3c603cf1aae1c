"""Matchers measured on real photographs: pictures inside scikit-image's wheel, under warps whose truth is known."""
