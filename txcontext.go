package inbox

import (
	"context"

	"github.com/watermill-inbox/inbox/internal/txctx"
)

// TxFromContext returns the transaction that ctx carries. T is the type that the store hands out: *sql.Tx for package
// sqlstore, pgx.Tx for package pgxstore. If ctx carries several (an inbox inside another's handler), it is the
// innermost one of that type.
//
// The transaction belongs to the inbox: do not commit it or roll it back. It is dead once the handler returned.
func TxFromContext[T any](ctx context.Context) (T, bool) {
	var tx T
	frame := txctx.Find(ctx, func(f *txctx.Frame) bool {
		native, ok := f.Native.(T)
		if ok {
			tx = native
		}
		return ok
	})
	return tx, frame != nil
}
