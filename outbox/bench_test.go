package outbox_test

import (
	"fmt"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/outbox"
	"github.com/watermill-inbox/inbox/sqlstore"
)

// discard is a broker that answers at once.
type discard struct{}

func (discard) Publish(string, ...*message.Message) error { return nil }
func (discard) Close() error                              { return nil }

// BenchmarkRelay relays 1 KB messages, a batch per iteration, into a broker that answers at once.
func BenchmarkRelay(b *testing.B) {
	for _, bb := range []struct {
		name string
		open func(testing.TB) database
	}{
		{"db=postgresql/driver=pgx", func(tb testing.TB) database { return openPgx(tb, pgx.QueryExecModeCacheStatement) }},
		{"db=postgresql/driver=stdlib", func(tb testing.TB) database {
			return openSQL(tb, "pgx", testenv.PostgreSQL(tb), sqlstore.PostgreSQL, `"watermill_%s"`)
		}},
		{"db=mariadb/driver=mysql", func(tb testing.TB) database {
			return openSQL(tb, "mysql", testenv.MariaDB(tb), sqlstore.MySQL, "`watermill_%s`")
		}},
	} {
		b.Run(bb.name, func(b *testing.B) {
			d := bb.open(b)
			if err := outbox.InitializeSchema(b.Context(), d.db, d.config); err != nil {
				b.Fatal(err)
			}
			relay := newRelay(b, d, discard{})
			publisher, err := outbox.NewPublisher(d.config)
			if err != nil {
				b.Fatal(err)
			}
			fill := func() {
				tx := d.begin(b)
				msgs := make([]*message.Message, 2000)
				for i := range msgs {
					msgs[i] = message.NewMessageWithContext(tx.ctx, fmt.Sprint(i), make([]byte, 1024))
				}
				if err := publisher.Publish("t", msgs...); err != nil {
					b.Fatal(err)
				}
				tx.commit()
			}
			b.ReportAllocs()
			relayed := 0
			for b.Loop() {
				n := relayOnce(b, relay)
				if relayed += n; n < 100 {
					b.StopTimer()
					fill()
					b.StartTimer()
				}
			}
			b.ReportMetric(float64(relayed)/b.Elapsed().Seconds(), "messages/s")
		})
	}
}
