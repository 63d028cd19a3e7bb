// The lines that gRPC logs by itself, as lines of the server's own log.
#ifndef HEADWATER_SERVER_SERVICE_GRPC_LOG_H_
#define HEADWATER_SERVER_SERVICE_GRPC_LOG_H_

namespace headwater::service {

// From now on gRPC's lines are lines of observability::Log(), at most kGrpcLinesASecond each second and ten times as many at once
// after a quiet time. A failed TLS handshake is `event=tls_handshake_failed` at level warning, and is always counted
// (observability::Metrics). Every other line is `event=grpc` at gRPC's own level. For the process, at its start.
void TakeGrpcLog();

inline constexpr double kGrpcLinesASecond = 10;

}  // namespace headwater::service

#endif  // HEADWATER_SERVER_SERVICE_GRPC_LOG_H_
