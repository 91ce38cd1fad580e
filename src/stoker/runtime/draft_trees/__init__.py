"""Drafts of draft engines and recurrent heads: chains, static trees and dynamic trees, computed one level after another."""
