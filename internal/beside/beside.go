// Package beside runs work beside a Watermill router, which tells its plugins neither that it is closed nor waits for them.
package beside

import (
	"context"
	"time"
)

const (
	// closePoll is how often the router is asked whether it was closed, which it does not tell by itself.
	closePoll = 100 * time.Millisecond

	// closeWait is how long its answer may take. While a router's Close waits for handlers, there is none.
	closeWait = 200 * time.Millisecond
)

// Run calls run until ctx ends or the router is closed, or begins to close, which ends run's context. It returns early if
// run returns an error.
func Run(ctx context.Context, isClosed func() bool, run func(context.Context) error) {
	for {
		runCtx, stop := context.WithCancel(ctx)
		go func() {
			defer stop()
			waitUntilClosing(runCtx, isClosed)
		}()
		err := run(runCtx)
		stop()
		if err != nil || ctx.Err() != nil || isClosed() {
			return
		}
	}
}

// waitUntilClosing returns when the router is closed, or leaves the question whether it is unanswered: then it is most
// likely closing, but the machine may have slept as well, so the work pauses until there is an answer.
func waitUntilClosing(ctx context.Context, isClosed func() bool) {
	ticker := time.NewTicker(closePoll)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
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
