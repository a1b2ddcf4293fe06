"""Where one request goes: who may have it, whom the policy prefers, and the receipt."""
