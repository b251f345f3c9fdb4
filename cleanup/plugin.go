package cleanup

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox/internal/beside"
)

// Plugin returns a plugin that starts [Cleaner.Run] with the router. It ends within a second once ctx ends, the router is
// closed or begins to close, or the cleaner is closed. The router does not wait for its plugins: call [Cleaner.Close]
// before closing the database.
//
// A router whose Run fails to start is not closed by that; end ctx then.
func (c *Cleaner) Plugin(ctx context.Context) message.RouterPlugin {
	return func(router *message.Router) error {
		if c.isClosed() {
			return errClosed
		}
		go c.runBeside(ctx, router.IsClosed)
		return nil
	}
}

func (c *Cleaner) runBeside(ctx context.Context, isClosed func() bool) {
	beside.Run(ctx, isClosed, c.Run)
}
