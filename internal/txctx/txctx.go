// Package txctx carries inbox transactions in a context.
package txctx

import (
	"context"
	"sync/atomic"
)

type ctxKey struct{}

// Frame is one transaction that a context carries. Frames nest when a handler of one inbox runs inside another's.
type Frame struct {
	// Native is the transaction as handlers see it: a *sql.Tx, a pgx.Tx.
	Native any

	// Store and Key tell whose transaction it is.
	Store, Key any

	outer *Frame
	ended atomic.Bool
}

// End says that the handler is done with the transaction, though a goroutine that it left may still have the context.
func (f *Frame) End() { f.ended.Store(true) }

// Ended reports whether End was called.
func (f *Frame) Ended() bool { return f.ended.Load() }

// With returns a context that carries frame, inside of those that ctx carries. The frame belongs to the context
// afterwards.
func With(ctx context.Context, frame *Frame) context.Context {
	frame.outer = innermost(ctx)
	return context.WithValue(ctx, ctxKey{}, frame)
}

// Find returns the innermost frame that match accepts, or nil.
func Find(ctx context.Context, match func(*Frame) bool) *Frame {
	for frame := innermost(ctx); frame != nil; frame = frame.outer {
		if match(frame) {
			return frame
		}
	}
	return nil
}

func innermost(ctx context.Context) *Frame {
	frame, _ := ctx.Value(ctxKey{}).(*Frame)
	return frame
}
