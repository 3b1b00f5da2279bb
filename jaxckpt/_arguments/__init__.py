"""The meaning of the arguments that saves and restores share: trees and their leaves, `specs` and `dtype`."""
