package cleanup

import (
	"context"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	// closePoll is how often the router is asked whether it was closed, which it does not tell by itself.
	closePoll = 100 * time.Millisecond

	// closeWait is how long its answer may take. While [message.Router.Close] waits for handlers, there is none.
	closeWait = 200 * time.Millisecond
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

// runBeside runs until ctx ends or the router is closed.
func (c *Cleaner) runBeside(ctx context.Context, isClosed func() bool) {
	for {
		runCtx, stop := context.WithCancel(ctx)
		go func() {
			defer stop()
			waitUntilClosing(runCtx, isClosed)
		}()
		err := c.Run(runCtx)
		stop()
		if err != nil || ctx.Err() != nil || isClosed() {
			return
		}
	}
}

// waitUntilClosing returns when the router is closed, or leaves the question whether it is unanswered: then it is most
// likely closing, but the machine may have slept as well, so the cleaner pauses until there is an answer.
func waitUntilClosing(ctx context.Context, isClosed func() bool) {
	for {
		sleep(ctx, closePoll)
		if ctx.Err() != nil {
			return
		}
		answer := make(chan bool, 1)
		go func() { answer <- isClosed() }()
		timer := time.NewTimer(closeWait)
		select {
		case <-ctx.Done():
		case <-timer.C:
			return
		case closed := <-answer:
			if closed {
				return
			}
		}
		timer.Stop()
	}
}
