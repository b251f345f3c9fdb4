// Package inbox makes the effects of Watermill handlers happen exactly once in their database, although every broker
// delivers at least once: it is the transactional inbox pattern as a router middleware.
//
//	store, err := sqlstore.New(db, sqlstore.Config{Dialect: sqlstore.PostgreSQL})
//	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store})
//	router.AddMiddleware(dedup.Middleware)
//
// For each message, the middleware
//
//  1. takes the key: the consumer, which is the router's handler name, and the message ID. Deliveries of one key in this
//     process queue up in memory, before they take a connection;
//  2. begins a transaction whose first statement claims the key in the inbox table. If a committed record of it is
//     there, the message is a duplicate: it is acknowledged and skipped;
//  3. runs the handler with the transaction in the message's context, see [TxFromContext]. An error or a panic rolls back;
//  4. seals the record, with the messages that the handler returned, and commits;
//  5. hands those messages to the router, which publishes them and then acknowledges. Until it did, every duplicate hands
//     them out again, see [OutputMode].
//
// If the process dies after any of these steps, the redelivery either finds nothing and begins anew, or finds the record
// and goes on with the messages.
//
// # What is guaranteed
//
// At-least-once delivery, effects exactly once in this database: for one database, one inbox table, a stable message ID,
// and within the retention. What the handler does beside its transaction can repeat. A message is skipped only after the
// database showed a committed record of its key; whatever else goes wrong is an error, so that the broker delivers again.
//
// # Contexts
//
// The handler's context is the message's, with the transaction. COMMIT and ROLLBACK run on contexts of their own,
// bounded by [Config].CommitTimeout, since a router that closes cancels the contexts of all messages in flight at once.
//
// # Order of middleware
//
// The inbox is the innermost: PoisonQueueWithFilter with [Deduplicator.ShouldPoison], Retry with ResetContextOnRetry, Timeout,
// Recoverer, inbox.
//
// Timeout leaves an ended context on the message, and PoisonQueue publishes the message with the context that it has.
// Publishers that look at it (those of RabbitMQ, Redis and SQL do) refuse, the message is delivered again for ever, and the
// router does not log that, as it logs no error that wraps context.Canceled. Put a middleware that restores the message's
// context between the two, as the example of [Deduplicator.ShouldPoison] does.
package inbox
