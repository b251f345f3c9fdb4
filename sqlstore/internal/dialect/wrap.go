package dialect

import (
	"context"
	"errors"
	"fmt"
)

// Wrap says what was being done when err happened, and the hint, if there is one. If the context ended, the result is its
// error as well, which drivers do not always say.
func Wrap(ctx context.Context, doing string, err error, hint string) error {
	if ended := ctx.Err(); ended != nil && !errors.Is(err, ended) {
		err = fmt.Errorf("%w: %w", ended, err)
	}
	if hint != "" {
		return fmt.Errorf("inbox: %s: %w (%s)", doing, err, hint)
	}
	return fmt.Errorf("inbox: %s: %w", doing, err)
}
