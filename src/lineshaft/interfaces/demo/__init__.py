"""`lineshaft demo`: a small fleet builds a landing page, with everything going wrong that can."""
