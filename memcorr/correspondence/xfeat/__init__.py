"""XFeat, pretrained on photographs, behind our `Matcher` protocol."""
